"""Batches: files of requests that run when interactive traffic leaves capacity."""
