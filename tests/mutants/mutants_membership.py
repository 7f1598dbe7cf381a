"""Bugs planted into shrink, grow and join, and into replicas that come and go. ``python -m lab simulated-membership``
is what looks for them."""

from __future__ import annotations

from mutant import Mutant, mutant

MEMBERS = "communicator/membership.py"
COMMUNICATOR = "communicator/communicator.py"
EXCHANGE = "communicator/rendezvous/store_exchange.py"
DILOCO = "diloco/__init__.py"
REPLICAS = "diloco/replica_ranks.py"

MEMBERSHIP_MUTANTS = (
    mutant(
        "members: each one decides for itself",
        MEMBERS,
        'if self._store.call("compare_set", "group", expected, group.text).decode() == expected and expected:',
        'if self._store.call("set", "group", group.text):',
    ),
    mutant(
        "members: a group is decided before the others have come",
        MEMBERS,
        "if self._name in here and all(name in here or watch.is_gone(name) for name in before.names):",
        "if self._name in here:",
    ),
    mutant("members: newcomers get the first ranks", MEMBERS, "here + coming, tickets)", "coming + here, tickets)"),
    mutant(
        "members: newcomers are taken in again by the next group",
        MEMBERS,
        "self._decide(before, _Members(number, here + coming, tickets))",
        "self._decide(before, _Members(number, here + coming, before.tickets))",
    ),
    mutant(
        "members: all that have ever asked to join are taken in",
        MEMBERS,
        "for one in range(tickets, most)])",
        "for one in range(most)])",
    ),
    mutant(
        "members: one that was left out goes on",
        MEMBERS,
        "        if self._name in found.names:\n            return found\n        self._store.delete",
        "        if found is not None:\n            return found\n        self._store.delete",
    ),
    mutant(
        "members: one that was left out is not told",
        MEMBERS,
        "if refused is not None:",
        "if refused is not None and 0:",
    ),
    mutant("members: one that was left out is told another rank", MEMBERS, "rank=refused,", "rank=0,"),
    mutant(
        "members: a group that failed to connect is not called off",
        MEMBERS,
        "self._give_up(group.number)",
        "pass",
    ),
    mutant(
        "members: one that is late hides that a later group was given up",
        MEMBERS,
        "while int(found or -1) < number and",
        "while found != str(number) and",
    ),
    mutant(
        "members: the exchange of addresses waits for the dead",
        MEMBERS,
        "self.gone = {*filter(self._watch.is_gone, self._others)}",
        "pass",
    ),
    mutant(
        "members: the first waits for itself alone",
        MEMBERS,
        "if first == membership._name or membership._marks:",
        "if membership._marks:",
    ),
    mutant(
        "members: earlier ranks are those of the new group",
        MEMBERS,
        "names = last.names if last is not None and was_member else []",
        "names = group.names if last is not None and was_member else []",
    ),
    mutant(
        "members: one that rejoins was in the last group",
        MEMBERS,
        "was_member, group = False, self._as_newcomer()",
        "group = self._as_newcomer()",
    ),
    mutant(
        "members: a rank that was silent while the ranks connect is waited for again",
        MEMBERS,
        "suspects = store.gone",
        "suspects = set()",
    ),
    mutant(
        "members: nobody is heard over earlier connections",
        MEMBERS,
        "if self._heard[name] > when_s + _HEARD_ANEW_S",
        "if 0",
    ),
    mutant(
        "members: whoever was heard once over earlier connections lives for ever",
        MEMBERS,
        "if self._heard[name] > when_s + _HEARD_ANEW_S",
        "if when_s",
    ),
    mutant(
        "members: those that work count as silent",
        MEMBERS,
        "is_quiet = self._waits and",
        "is_quiet = 0 and",
    ),
    mutant(
        "members: nobody says that it works",
        MEMBERS,
        'self._store.call("set", beat, _QUIET)',
        "pass",
    ),
    mutant(
        "members: a rank that has failed shows no sign of life",
        COMMUNICATOR,
        "        membership.hear_by(self)\n",
        "",
    ),
    mutant(
        "members: those that have gone stay in the store",
        MEMBERS,
        "            self._store.delete(keys)\n\n",
        "",
    ),
    mutant(
        "members: who is silent for a moment is gone",
        MEMBERS,
        "return self.silent_s(name) > limit_s",
        "return self.silent_s(name) > 0.3",
    ),
    mutant(
        "members: signs of life do not count",
        MEMBERS,
        "if one not in self._seen or beat != self._seen[one] or one in heard or is_quiet:",
        "if one not in self._seen or one in heard or is_quiet:",
    ),
    mutant(
        "members: all of other machines have ended",
        MEMBERS,
        'if state == "gone":',
        'if state != "runs":',
    ),
    mutant(
        "members: the signs of life are all alike",
        MEMBERS,
        'self.store.set(key, f"{number} {self._count}")',
        'self.store.set(key, f"{number} 1")',
    ),
    mutant(
        "members: a newcomer shows no sign of life",
        MEMBERS,
        '        self._store.begin(f"beat/{self._own}", 0)\n\n    def _ask_to_join',
        "\n    def _ask_to_join",
    ),
    mutant(
        "members: the first group begins before all have asked",
        MEMBERS,
        "if name]) >= count:",
        "if name]) >= count - 1:",
    ),
    mutant(
        "members: the thread for the store goes on",
        MEMBERS,
        '"ends" if ends else "fails")\n        self._store.stop()',
        '"ends" if ends else "fails")',
    ),
    mutant(
        "members: only the first decides",
        MEMBERS,
        "if turn % _LOOKS_EVERY and not all(map(watch.is_gone, earlier)):",
        "if earlier:",
    ),
    Mutant(
        "members: time in which a process is frozen counts against the store",
        MEMBERS,
        (
            ("wait([answer], min(_BEAT_S, self._timeout_s))", "wait([answer], self._timeout_s)"),
            ("                waited_s += _BEAT_S", "                waited_s += self._timeout_s"),
        ),
    ),
    mutant(
        "members: a loss while the ranks connect is the caller's",
        MEMBERS,
        "if isinstance(error, TransportError):\n                        suspects",
        "if isinstance(error, TransportError) and group.number == 0:\n                        suspects",
    ),
    mutant(
        "members: ranks are counted from the end",
        MEMBERS,
        "earlier = group.names[: group.names.index(self._name)]\n        return",
        "earlier = group.names[group.names.index(self._name) + 1 :]\n        return",
    ),
    mutant(
        "members: a group's number is left out",
        MEMBERS,
        "number, turn = before.number + 1, 0",
        "number, turn = before.number + 2, 0",
    ),
    mutant(
        "members: nobody says that it has come",
        MEMBERS,
        'self.store.set(key, f"{number} {self._count}")',
        'self.store.set(key, f"0 {self._count}")',
    ),
    mutant(
        "members: addresses stay in the store",
        MEMBERS,
        "for key in exchange.own_keys())",
        "for key in ())",
    ),
    mutant(
        "members: addresses are cleared before all have them",
        COMMUNICATOR,
        "    new = kind._join(rank, size, exchange, options.tuning, options)\n    try:",
        "    new = kind._join(rank, size, exchange, options.tuning, options)\n    try:\n        if rank == 0:\n"
        "            membership.clear(exchange)",
    ),
    mutant(
        "members: grow() tells how many have asked",
        COMMUNICATOR,
        "return self._regroup(admit=True)[0].count(-1) if found[0] else 0",
        "return int(found[0]) if self._regroup(admit=True) and found[0] else 0",
    ),
    mutant(
        "members: shrink() blames itself",
        COMMUNICATOR,
        'blamed=failure["peer"])[0]',
        "blamed=self.world_size)[0]",
    ),
    mutant(
        "members: the old communicator is used on after shrink()",
        COMMUNICATOR,
        "        self.__dict__.update(new.__dict__)\n",
        "",
    ),
    mutant(
        "members: addresses come in the order of their lengths",
        EXCHANGE,
        "return answer.blobs\n\n    def _hear",
        "return sorted(answer.blobs)\n\n    def _hear",
    ),
    mutant(
        "replicas: one that fails to align keeps the others waiting",
        DILOCO,
        '                self._ranks.abort(f"{type(error).__name__}: {error}")\n            worst',
        "                pass\n            worst",
    ),
    mutant(
        "replicas: a newcomer waits for a rank that has ended",
        MEMBERS,
        "if any(left) or watch.look_here([self._name]) or watch.silent_s(self._name) > most_s:",
        "if any(left):",
    ),
    mutant("replicas: newcomers keep their parameters", DILOCO, "takes=lacks)", "takes=False)"),
    mutant(
        "replicas: newcomers begin with a momentum of nothing",
        DILOCO,
        '        self.outer.load_state_dict(state["outer"])\n        self._round, self._steps',
        "        self._round, self._steps",
    ),
    mutant(
        "replicas: a rank goes on without one that has failed",
        DILOCO,
        "elif worst == 1 and error is None:",
        "elif worst == 3:",
    ),
    mutant(
        "replicas: a round that others have ended is lost",
        DILOCO,
        "if mine is not None and prepared[place, position] and mine[0].flight is not None:",
        "if mine is None and prepared[place, position]:",
    ),
)
