"""`andon supervise`: starts a job, keeps it held while it is held, starts it again when that is allowed."""
