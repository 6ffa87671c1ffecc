"""The controller's REST API for operators: health, figures, entries, sessions, invalidations."""
