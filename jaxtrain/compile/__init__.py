"""Compiled programs: ahead of time, kept between runs, with their XLA options."""
