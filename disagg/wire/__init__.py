"""Protobuf between pods: conversion, stubs, servicers' bases, reflection, statuses. The only user of generated code."""
