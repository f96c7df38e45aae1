"""Processes with limits of CPU time and memory, for code and parsers that may do harm with what strangers wrote."""
