"""The network laboratory: built and removed completely, also when something fails, with counters that count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from telegrad.tools.bench import netlab
from telegrad.tools.bench.netlab import Netlab, NetlabError

_SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(netlab.__file__)))


def _usable() -> str | None:
    reason = netlab.why_unavailable()
    if reason is None:
        try:
            with Netlab(1, "1gbit"):
                pass
        except NetlabError as error:
            reason = str(error)
    return reason


needs_lab = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def lab_works() -> None:
    reason = _usable()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("rate", "bits_per_s"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("64kbit", 64e3), ("1GBIT", 1e9)]
)
def test_rates(rate: str, bits_per_s: float) -> None:
    assert netlab.parse_rate(rate) == bits_per_s


@pytest.mark.parametrize("rate", ["", "fast", "0gbit", "-1gbit", "1gb", "1 gbit"])
def test_bad_rate(rate: str) -> None:
    with pytest.raises(ValueError, match="kbit, mbit or gbit"):
        Netlab(2, rate)


@pytest.mark.parametrize("ranks", [0, 251])
def test_bad_number_of_ranks(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks={ranks}"):
        Netlab(ranks)


def test_unknown_rank() -> None:
    with pytest.raises(ValueError, match="rank=2 is not in this laboratory of 2"):
        Netlab(2).prefix_of(2)


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetlabError, match="need root"):
        Netlab(2).create()


def test_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NetlabError, match="ip and tc not found: install iproute2"):
        Netlab(2).create()


@needs_lab
@pytest.mark.usefixtures("lab_works")
def test_ranks_reach_each_other_and_the_counters_see_it() -> None:
    with Netlab(2, "1gbit") as lab, Netlab(1, None) as other:
        assert lab.hub != other.hub
        server = (
            "import socket,sys; s=socket.create_server(('0.0.0.0',5000)); print('up',flush=True); c,_=s.accept()\n"
            "n=0\nwhile d:=c.recv(65536): n+=len(d)\nprint(n)"
        )
        client = f"import socket; s=socket.create_connection(('{lab.address_of(0)}',5000)); s.sendall(bytes(1000000))"
        with subprocess.Popen(
            [*lab.prefix_of(0), sys.executable, "-c", server], stdout=subprocess.PIPE, text=True
        ) as listening:
            assert listening.stdout is not None
            assert listening.stdout.readline() == "up\n"
            before = lab.counters()
            subprocess.run([*lab.prefix_of(1), sys.executable, "-c", client], check=True, timeout=60)
            assert listening.stdout.read() == "1000000\n"
        after = lab.counters()
        assert after[1].sent - before[1].sent > 1_000_000
        assert after[0].received - before[0].received > 1_000_000
        assert after[0].sent - before[0].sent < 500_000
        shaped = subprocess.run(["tc", "-n", lab.hub, "qdisc", "show"], capture_output=True, text=True, check=True)
        assert shaped.stdout.count("tbf") == 2
        names = {lab.hub, lab.namespace_of(0), lab.namespace_of(1), other.hub}
        assert names <= set(netlab._namespaces())
    assert not names & set(netlab._namespaces())


@needs_lab
@pytest.mark.usefixtures("lab_works")
def test_removed_after_an_exception() -> None:
    lab = Netlab(2)
    with pytest.raises(ZeroDivisionError), lab:
        raise ZeroDivisionError
    assert lab.hub not in netlab._namespaces()
    lab.destroy()


@needs_lab
@pytest.mark.usefixtures("lab_works")
def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Netlab(2)
    monkeypatch.setattr(lab, "_shape", lambda *_: netlab._run(["tc", "nonsense"]))
    with pytest.raises(NetlabError, match="`tc nonsense` failed"):
        lab.create()
    assert not [name for name in netlab._namespaces() if name.startswith(lab.hub.removesuffix("hub"))]


_SLEEPER = """
import time
from telegrad.tools.bench.netlab import Netlab
with Netlab(1) as lab:
    print(lab.hub, flush=True)
    for _ in range(600):  # a signal that comes just before one long sleep would be heard after it
        time.sleep(0.1)
"""


@needs_lab
@pytest.mark.usefixtures("lab_works")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_removed_after_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": _SOURCE},
    ) as process:
        assert process.stdout is not None
        hub = process.stdout.readline().strip()
        assert hub in netlab._namespaces()
        process.send_signal(number)
        process.wait(60)
    if number == signal.SIGKILL:  # nobody could: the next laboratory does
        assert hub in netlab.remove_stale()
    assert hub not in netlab._namespaces()


@needs_lab
@pytest.mark.usefixtures("lab_works")
def test_a_signal_while_removing_is_kept_until_the_end() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
    try:
        with netlab.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert len(seen) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_idle_link_saves_up_128_kib_or_a_millisecond() -> None:
    assert netlab.burst_bytes(1e9) == 128 << 10
    assert netlab.burst_bytes(1e10) == 1_250_000
