#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, Debian's C library: TCPStore, by which the processes of every job find each other.
#
# Behaviour: each connection asks the name server twice for the name of an address, also where all processes are of one
# host that /etc/hosts names: the sockets are of IPv6, and the C library looks up ::ffff:127.0.0.1 in no file, while for
# 127.0.0.1 it asks nobody. One of the two is asked by the server's only thread, so that processes that join wait for
# each other: with a name server that takes half a second, 8 processes that connect at once take 4 s and more. With one
# that drops questions, as a resolv.conf of another network does, each lookup takes 5 s or longer. Nothing is logged
# unless the name server fails. Neither libuv nor "localhost" changes it.
#
# Seen (a name server of our own that answers after 0.5 s that there is no such name):
#   C library, 127.0.0.1: 0 questions
#   C library, ::ffff:127.0.0.1: 1 question
#   store of 127.0.0.1, libuv: 2 questions for the server's own client, 16 for 8 more, which took over 4 s at once
#   store of 127.0.0.1, without libuv: 2 questions for the server's own client, 16 for 8 more, which took over 4 s at once
#   store of localhost, libuv: 2 questions for the server's own client, 16 for 8 more, which took over 4 s at once
# Exits with 0 if that is so. Needs root or user namespaces (unshare), for a resolv.conf and a port 53 of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import socket
import subprocess
import sys
import threading
import time

LATE_S = 0.5
asked = []
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))


def answer(question, client):
    time.sleep(LATE_S)
    no_such_name = question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12:]
    server.sendto(no_such_name, client)


def serve():
    while True:
        question, client = server.recvfrom(512)
        asked.append(question)
        threading.Thread(target=answer, args=(question, client), daemon=True).start()


threading.Thread(target=serve, daemon=True).start()


def questions(act):
    asked.clear()
    found = act()
    return len(asked), found


def name_of(address):
    try:
        socket.getnameinfo(address, 0)
    except OSError:
        pass


STORES = """
import os
import sys
import time
from torch.distributed import TCPStore

host, libuv, clients = sys.argv[1], sys.argv[2] == "libuv", int(sys.argv[3])
store = TCPStore(host, 0, None, True, use_libuv=libuv)
begin = time.monotonic()
children = []
for _ in range(clients):
    child = os.fork()
    if child == 0:
        TCPStore(host, store.port, None, False)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
print(time.monotonic() - begin)
"""


def stores(host, libuv, clients):
    done = subprocess.run(
        [sys.executable, "-c", STORES, host, libuv, str(clients)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


for text, address in (("127.0.0.1", ("127.0.0.1", 1)), ("::ffff:127.0.0.1", ("::ffff:127.0.0.1", 1, 0, 0))):
    count, _ = questions(lambda address=address: name_of(address))
    print(f"C library, {text}: {count} question{'s' if count != 1 else ''}")
for host, libuv in (("127.0.0.1", "libuv"), ("127.0.0.1", "without libuv"), ("localhost", "libuv")):
    own, _ = questions(lambda: stores(host, libuv, 0))
    all_of_them, took_s = questions(lambda: stores(host, libuv, 8))
    waited = "over 4 s" if took_s > 8 * LATE_S else f"{took_s:.1f} s"
    print(
        f"store of {host}, {libuv}: {own} questions for the server's own client, {all_of_them - own} for 8 more, "
        f"which took {waited} at once"
    )
PYTHON
cat >"$folder/within.sh" <<'SHELL'
set -e
ip link set lo up
printf 'nameserver 127.0.0.1\n' >"$1/resolv.conf"
mount --bind "$1/resolv.conf" /etc/resolv.conf
printf '127.0.0.1 localhost\n' >"$1/hosts"
mount --bind "$1/hosts" /etc/hosts
exec "$1/venv/bin/python" "$1/program.py"
SHELL
found=$(unshare -Urmn sh "$folder/within.sh" "$folder")
expected=$(sed -n 's/^#   //p' "$0")
echo "$found"
[ "$found" = "$expected" ]
