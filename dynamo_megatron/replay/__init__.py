"""What each allocator would have given each prompt of a recorded run."""
