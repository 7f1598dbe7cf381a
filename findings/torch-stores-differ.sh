#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11: the key-value stores under torch.distributed, HashStore, FileStore, and TCPStore with and
# without libuv.
#
# Behaviour: the stores pass for interchangeable, but FileStore's delete_key() answers True for a key that was never set
# (the others: False), so that "who deletes it, has it" gives one key to several. Its get() of a missing key ends with a
# plain RuntimeError, not the DistStoreError of the others, which a program that retries has to catch apart. num_keys()
# begins at 1 in FileStore and TCPStore, each with a key of its own, and a PrefixStore counts the keys of all prefixes.
# Queues exist in HashStore and in TCPStore with libuv only.
#
# Seen:
#   delete_key of a missing key: hash False, file True, tcp False, tcp without libuv False
#   get of a missing key: hash DistStoreError, file RuntimeError, tcp DistStoreError, tcp without libuv DistStoreError
#   num_keys of a new store: hash 0, file 1, tcp 1, tcp without libuv 1
#   num_keys under an unused prefix, after a key of another one: hash 1, file 2, tcp 2, tcp without libuv 2
#   queue_pop: hash b'a', file NotImplementedError, tcp b'a', tcp without libuv NotImplementedError
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import tempfile
from datetime import timedelta

from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore


def new_stores():
    stores = {
        "hash": HashStore(),
        "file": FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1),
        "tcp": TCPStore("127.0.0.1", 0, 1, True),
        "tcp without libuv": TCPStore("127.0.0.1", 0, 1, True, use_libuv=False),
    }
    for store in stores.values():
        store.set_timeout(timedelta(seconds=1))
    return stores


def show(what, act):
    found = []
    for name, store in new_stores().items():
        try:
            answer = act(store)
        except Exception as error:
            answer = type(error).__name__
        found.append(f"{name} {answer}")
    print(f"{what}: {', '.join(found)}")


def after_another_prefix(store):
    PrefixStore("one", store).set("key", "value")
    return PrefixStore("other", store).num_keys()


def queue(store):
    store.queue_push("queue", "a")
    return store.queue_pop("queue")


show("delete_key of a missing key", lambda store: store.delete_key("key"))
show("get of a missing key", lambda store: store.get("key"))
show("num_keys of a new store", lambda store: store.num_keys())
show("num_keys under an unused prefix, after a key of another one", after_another_prefix)
show("queue_pop", queue)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
