"""Exchange between sites that are jobs of their own: a store of immutable values, and its server."""
