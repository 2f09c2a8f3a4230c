"""Engine: runs models under noise, feeds them their inputs, and knows them again."""
