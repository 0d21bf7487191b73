"""One way of sharding for every table of a model, and the ranks that hold its shards: menus, bounds, packing."""
