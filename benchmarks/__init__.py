"""`floor`, `offline` and `load` answer one question each; results carry command, commit and hardware."""
