"""The database backend in force when there is no database to talk to."""
