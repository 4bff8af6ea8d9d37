"""The report of a run: reading it, the model card, the closing table, and drawings."""
