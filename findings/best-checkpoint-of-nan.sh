#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 with jax 0.10.2, pytorch-ignite 0.5.5 with torch 2.13.0, Keras 3.15.1, CPU, Python 3.11: the option of
# each to keep the best checkpoint, where one evaluation gave NaN (a loss that overflowed, a metric of an empty batch).
#
# Behaviour: NaN has no place in an order, and none of the three sets it apart. orbax sorts it with the others. So a NaN
# that comes last replaces the best checkpoint, and after a NaN the worst of 3, 2, NaN, 1 does. The better checkpoint is
# deleted. ignite keeps a NaN that comes first, and saves nothing after it; of two checkpoints, a NaN blocks all later
# ones, too. Keras saves nothing more if the first epoch gave NaN; later NaN do no harm. No error, no warning. Scores that
# are minus infinity where they would be NaN help in all three.
#
# Seen (scores of steps 0, 1, ..., larger is better; scores of the checkpoints that are left):
#   orbax, 3, 2, 1: 3
#   orbax, 3, 2, nan, 1: 1
#   orbax, 1, 3, 2, nan: nan
#   orbax, nan, 1, 3, 2: 3
#   ignite, 1, 3, 2: 3
#   ignite, nan, 1, 3, 2: nan
#   ignite, 1, nan, 2, 3: 3
#   ignite, 1, nan, 2, 3, of two: nan, 2
#   Keras, 1, 3, 2: 1, 3
#   Keras, nan, 1, 3, 2: nan
#   Keras, 1, nan, 3, 2: 1, 3
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  orbax-checkpoint==0.12.8 jax==0.10.2 pytorch-ignite==0.5.5 torch==2.13.0 keras==3.15.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import tempfile
import warnings

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
warnings.simplefilter("ignore")

import keras
import numpy as np
import orbax.checkpoint as orbax
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

nan = float("nan")


def orbax_keeps(scores, folder):
    options = orbax.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["score"], best_mode="max", enable_async_checkpointing=False
    )
    with orbax.CheckpointManager(folder, options=options) as manager:
        for step, score in enumerate(scores):
            manager.save(step, args=orbax.args.StandardSave({"x": np.ones(2)}), metrics={"score": score})
        assert manager.all_steps() == [manager.best_step()]
        return manager.all_steps()


def ignite_keeps(scores, folder, number=1):
    rest = iter(scores)
    best = Checkpoint(
        {"model": torch.nn.Linear(1, 1)}, DiskSaver(folder), n_saved=number, filename_pattern="{global_step}.pt",
        score_name="score", score_function=lambda engine: next(rest),
        global_step_transform=lambda engine, event: engine.state.epoch - 1,
    )  # fmt: skip
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_COMPLETED, best)
    engine.run([0], max_epochs=len(scores))
    return [int(name.split(".")[0]) for name in os.listdir(folder)]


def keras_keeps(scores, folder):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    best = keras.callbacks.ModelCheckpoint(folder + "/{epoch}.keras", monitor="score", save_best_only=True, mode="max")
    best.set_model(model)
    best.on_train_begin()
    for step, score in enumerate(scores):
        best.on_epoch_begin(step)
        best.on_epoch_end(step, {"score": score})
    return [int(name.split(".")[0]) - 1 for name in os.listdir(folder)]


def tell(name, keeps, scores, end="", **options):
    with tempfile.TemporaryDirectory() as folder:
        steps = sorted(keeps(scores, folder, **options))
    given, left = (", ".join(f"{score:g}" for score in some) for some in (scores, [scores[step] for step in steps]))
    print(f"{name}, {given}{end}: {left}", flush=True)


tell("orbax", orbax_keeps, (3, 2, 1))
tell("orbax", orbax_keeps, (3, 2, nan, 1))
tell("orbax", orbax_keeps, (1, 3, 2, nan))
tell("orbax", orbax_keeps, (nan, 1, 3, 2))
tell("ignite", ignite_keeps, (1, 3, 2))
tell("ignite", ignite_keeps, (nan, 1, 3, 2))
tell("ignite", ignite_keeps, (1, nan, 2, 3))
tell("ignite", ignite_keeps, (1, nan, 2, 3), end=", of two", number=2)
tell("Keras", keras_keeps, (1, 3, 2))
tell("Keras", keras_keeps, (nan, 1, 3, 2))
tell("Keras", keras_keeps, (1, nan, 3, 2))
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
