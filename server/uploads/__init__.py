"""Taking uploads in: their checks in a process with limits, and the files of those in pieces."""
