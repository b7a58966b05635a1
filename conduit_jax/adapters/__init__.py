"""Bridges to other frameworks. Each is imported by name, so that none is needed unless it is used."""
