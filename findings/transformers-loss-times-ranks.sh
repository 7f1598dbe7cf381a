#!/usr/bin/env bash
# transformers 5.24.0 with accelerate 1.15.0 and torch 2.13.0, CPU, Python 3.11: Trainer with gradient accumulation, and with
# two ranks (torchrun, Gloo).
#
# Behaviour: for many models the gradient grows with the number of accumulated batches and with the number of ranks. Trainer
# asks the model to divide its loss by the tokens of the whole step (num_items_in_batch), and then multiplies by the ranks.
# It takes any forward with **kwargs for one that divides. Heads that take **kwargs and use the mean of their own batch do
# not: classification of texts and tokens, masked language models, T5 and BART; causal language models do divide. The
# logged loss grows alike. Adam hides the factor, max_grad_norm turns it into other clipping, and SGD diverges. That
# accumulation is wrong is known there (issue 47688). model.accepts_loss_kwargs = False before Trainer(...) makes it right.
#
# Seen (8 rows a rank, the same on both ranks, so that the mean is one rank's; lengths of the gradient beside that of 1 batch of
# 8 rows on one rank):
#   BertForSequenceClassification: 1 batch 1.0, 4 batches 4.0, 2 ranks 2.0, both 8.0
#   BertForTokenClassification: 1 batch 1.0, 4 batches 4.0, 2 ranks 2.0, both 8.0
#   BertForMaskedLM: 1 batch 1.0, 4 batches 4.0, 2 ranks 2.0, both 8.0
#   LlamaForSequenceClassification: 1 batch 1.0, 4 batches 4.0, 2 ranks 2.0, both 8.0
#   LlamaForCausalLM: 1 batch 1.0, 4 batches 1.0, 2 ranks 1.0, both 1.0
#   BertForSequenceClassification, accepts_loss_kwargs = False: 1 batch 1.0, 4 batches 1.0, 2 ranks 1.0, both 1.0
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import json
import os
import sys

import torch
import transformers

CASES = {
    "BertForSequenceClassification": (transformers.BertForSequenceClassification, lambda ids: ids[:, 0] % 3, True),
    "BertForTokenClassification": (transformers.BertForTokenClassification, lambda ids: ids % 3, True),
    "BertForMaskedLM": (transformers.BertForMaskedLM, lambda ids: ids, True),
    "LlamaForSequenceClassification": (transformers.LlamaForSequenceClassification, lambda ids: ids[:, 0] % 3, True),
    "LlamaForCausalLM": (transformers.LlamaForCausalLM, lambda ids: ids, True),
    "BertForSequenceClassification, accepts_loss_kwargs = False": (
        transformers.BertForSequenceClassification, lambda ids: ids[:, 0] % 3, False,
    ),
}  # fmt: skip
RANKS = int(os.environ.get("WORLD_SIZE", 1))
FOLDER = sys.argv[1]


class Norm(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
        self.found = sum(squares) ** 0.5


def norm(kind, labels, is_unchanged, size, batches):
    torch.manual_seed(0)
    ids = torch.randint(3, 30, (8, 8)).repeat_interleave(RANKS, dim=0)  # ranks take every RANKS-th row
    if RANKS > 1:  # or batches in turn: the rows of a batch follow one another for each rank
        ids = ids[::RANKS].view(batches, size, 8).repeat_interleave(RANKS, dim=0).view(-1, 8)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels(ids), strict=True)]
    settings = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    names = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, num_labels=3)
    model = kind(kind.config_class(**settings, **names))
    if not is_unchanged:
        model.accepts_loss_kwargs = False
    seen = Norm()
    arguments = transformers.TrainingArguments(
        f"{FOLDER}/out", per_device_train_batch_size=size, gradient_accumulation_steps=batches, max_steps=1, use_cpu=True,
        max_grad_norm=0, report_to=[], save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[seen]).train()
    return seen.found


found = {name: [norm(*case, 8, 1), norm(*case, 2, 4)] for name, case in CASES.items()}
if int(os.environ.get("RANK", 0)) == 0:
    if RANKS == 1:
        json.dump(found, open(f"{FOLDER}/alone", "w"))
    else:
        for name, (one, four) in json.load(open(f"{FOLDER}/alone")).items():
            values = (value / one for value in (one, four, *found[name]))
            print("{}: 1 batch {:.1f}, 4 batches {:.1f}, 2 ranks {:.1f}, both {:.1f}".format(name, *values), flush=True)
PYTHON
export HF_HUB_OFFLINE=1
"$folder/venv/bin/python" "$folder/program.py" "$folder" >"$folder/log" 2>&1 || cat "$folder/log"
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" "$folder" 2>>"$folder/log" | grep "1 batch" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
