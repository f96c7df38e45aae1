"""What the server says about itself: health, engine state, metrics."""
