"""The private PostgreSQL and Valkey that `manage.py up` runs when no URL names real ones."""
