"""Routes on which the server tells its state: health, engine, metrics."""
