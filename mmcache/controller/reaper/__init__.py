"""Gives bytes back that nobody reads any more: a thread of the controller's, and a child process that asks the store."""
