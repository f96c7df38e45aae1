"""The HTTP API and the command line. Knows neither tensors nor pages."""
