"""The subcommands of weft."""
