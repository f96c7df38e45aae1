"""The batch lane: files of requests that run in what interactive traffic leaves."""
