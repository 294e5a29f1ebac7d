"""Front of a cluster: the server of one device with the engines of many nodes in place of one."""
