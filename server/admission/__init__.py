"""Admission: what a request passes between its authentication and its route."""
