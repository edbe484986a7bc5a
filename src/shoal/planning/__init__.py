"""Planning: decide what a run does: layout, micro-batches, buckets, schedules. No torch."""
