"""Tools and reasoning: the formats of models, what may be called, the grammar of calls, and the reading of answers."""
