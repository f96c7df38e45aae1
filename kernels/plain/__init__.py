"""Every operation in torch operators: the definition, and the implementation where there is no compiler."""
