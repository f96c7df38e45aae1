"""Every operation in torch operators: the definition, and what runs where there is no compiler."""
