"""The description of the machine: what must be in it, and what must not."""

from __future__ import annotations

import json

import pytest

from telegrad.tools.doctor import host
from telegrad.tools.doctor.host import as_text, describe_environment, shown_variables
from telegrad.tools.doctor.installation import ProbeFailed


def test_it_holds_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do not tell")
    described = json.loads(json.dumps(describe_environment()))
    assert (described["kind"], described["version"]) == ("telegrad environment", 1)
    assert described["variables"]["UCX_NET_DEVICES"] == "lo"
    assert {"telegrad", "numpy"} <= described["packages"].keys()
    assert described["ucx"]["version"].startswith("1.")
    text = as_text(described)
    for part in ("processor:", "memory:", "os:", "python:", "ucx:", "packages:", "UCX_NET_DEVICES=lo", "lo up, 127.0."):
        assert part in text
    assert "do not tell" not in text + json.dumps(described)


def test_only_named_variables_are_shown() -> None:
    shown = shown_variables(
        {
            "HOME": "/root",
            "MY_UCX_TLS": "no",
            "HF_TOKEN": "no",
            "SLURM_JWT": "no",
            "SLURM_JOB_ID": "17",
            "RANK": "1",
            "NCCL_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": "node0",
            "UCX_KEEPALIVE_INTERVAL": "1s",
            "TELEGRAD_API_KEY": "secret",
            "GLOO_AUTH_TOKEN": "secret",
        }
    )
    assert shown == {
        "GLOO_AUTH_TOKEN": "(hidden)",
        "MASTER_ADDR": "node0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "1",
        "SLURM_JOB_ID": "17",
        "TELEGRAD_API_KEY": "(hidden)",
        "UCX_KEEPALIVE_INTERVAL": "1s",
    }


def test_a_core_that_does_not_load_is_part_of_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ProbeFailed("ImportError: libucp.so.0")

    monkeypatch.setattr(host, "loaded_ucx", fail)
    described = describe_environment()
    assert described["ucx"] == {"fault": "ImportError: libucp.so.0"}
    assert "telegrad does not load: ImportError: libucp.so.0" in as_text(described)
