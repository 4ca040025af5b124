"""A site's identity among other sites: its long-lived key, the peers that it has pinned, its part in secure sums."""
