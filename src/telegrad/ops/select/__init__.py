"""Which entries of a residual are sent: thresholds, and the pass that adds, packs and clears."""
