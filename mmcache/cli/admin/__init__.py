"""Commands that ask the controller's admin API: `mmcache sessions`, `entries`, `invalidations`, `audit`."""
