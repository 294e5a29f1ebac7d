"""Devices: what runs a step. The engine says what to do as plain data; torch does it, here or in
other processes.
"""
