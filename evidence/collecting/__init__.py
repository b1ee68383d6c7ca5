"""Items from planned to sealed: the work, and what each kind of evidence is made of."""
