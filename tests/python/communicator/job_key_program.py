"""Ranks that join with a job's key, or try to: each prints as JSON what it sums and counts, or how joining fails."""

from __future__ import annotations

import json

import numpy as np

from telegrad.errors import TransportError
from telegrad.launch import join


def meet() -> None:
    try:
        with join(timeout_s=30.0, join_timeout_s=30.0) as communicator:
            sums = []
            for count in (1, 1000, 300_000):  # short, and by rendezvous
                x = np.full(count, communicator.rank + 1.0, np.float32)
                communicator.all_reduce(x)
                sums.append([float(x.min()), float(x.max())])
            with communicator.split(0) as part:
                y = np.ones(5, np.float32)
                part.all_reduce(y)
            print(json.dumps({"sums": sums, "part": float(y[0]), "refused": communicator.stats()["messages_refused"]}))
    except (TransportError, ValueError) as error:
        peer = getattr(error, "peer", None)
        print(json.dumps({"error": type(error).__name__, "text": str(error), "peer": peer}), flush=True)
