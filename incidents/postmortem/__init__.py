"""An incident's postmortem: read from its rows, edited by people, rendered by `andon.postmortem`."""
