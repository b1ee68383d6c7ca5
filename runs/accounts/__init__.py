"""People's accounts: how they sign in, prove it is them, hold roles and tokens; and the log of all that."""
