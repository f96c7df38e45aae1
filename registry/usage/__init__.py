"""Usage events: journal, ledger, sums and questions about them."""
