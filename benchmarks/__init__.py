"""`floor`, `offline`, `load` and `page_waste` answer one question each; results carry command, commit and hardware."""
