"""What a checkpoint holds comes back bitwise, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lab.accuracy import checkpoint


def test_a_tree_comes_back(tmp_path: Path) -> None:
    tree = {
        "weights": {"a.b": torch.randn(3, 4), "half": torch.ones(2).to(torch.float64)},
        0: [1, 2.5, None, True, "text", float("inf")],
        "arrays": [np.arange(5, dtype=np.uint32), np.float32(0.1)],
        "nothing": {},
    }
    path = tmp_path / "tree.npz"
    checkpoint.save(path, {"an": "older one"})
    checkpoint.save(path, tree)
    assert [file.name for file in tmp_path.iterdir()] == ["tree.npz"]
    back = checkpoint.load(path)
    assert list(back) == list(tree)
    assert torch.equal(back["weights"]["a.b"], tree["weights"]["a.b"])
    assert back["weights"]["half"].dtype == torch.float64
    assert back[0] == tree[0]
    assert back["arrays"][0].dtype == np.uint32
    assert np.array_equal(back["arrays"][0], tree["arrays"][0])
    assert back["arrays"][1] == float(np.float32(0.1))
    assert back["nothing"] == {}


def test_the_state_of_an_optimiser_comes_back(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(4)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(3)
    checkpoint.save(tmp_path / "s.npz", [model.state_dict(), optimizer.state_dict()])
    other, other_optimizer = trained(0)
    weights, state = checkpoint.load(tmp_path / "s.npz")
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        one.zero_grad()
        one(torch.ones(4)).square().sum().backward()
        its_optimizer.step()
    assert torch.equal(model.weight, other.weight)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"tree\['a'\]\[1\] is a set"):
        checkpoint.save(tmp_path / "s.npz", {"a": [1, {2}]})
    assert not (tmp_path / "s.npz").exists()


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s.npz"
    checkpoint.save(path, {"a": torch.zeros(1000)})
    if damage == "other":
        np.savez(path, a=np.zeros(3))
    else:
        path.write_bytes(path.read_bytes()[:900] if damage == "cut" else b"")
    with pytest.raises(ValueError, match="s.npz is damaged.*remove it"):
        checkpoint.load(path)
