"""The one error of the demo."""

from mmcache.errors import MMCacheError


class DemoError(MMCacheError):
    """The demo cannot run, or one of its processes failed; the message says what to do or shows the end of a log."""
