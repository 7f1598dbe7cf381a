"""``telegrad bench topk-allreduce``: schemes that sum what ranks have selected, simulated and measured."""
