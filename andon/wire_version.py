"""The version of the wire. Within `/api/v1` things are only added."""

VERSION = "1.0"
HEADER = "andon-wire-version"
