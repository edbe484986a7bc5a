"""Measure a machine with torch: rates of devices and links, memory, disks."""
