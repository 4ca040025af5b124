"""A site's side of a secure sum: its session, its promises and the peers that it trusts. Pure."""
