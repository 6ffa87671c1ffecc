"""Gives bytes back that nobody reads any more: a thread of the controller, and a child process that asks the store."""
