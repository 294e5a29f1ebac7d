"""Files and checkpoints on disk, on one machine or shared by a URL."""
