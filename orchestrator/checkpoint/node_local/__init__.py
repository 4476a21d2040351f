"""Parts of resume points on the disks of nodes."""
