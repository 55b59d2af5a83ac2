#!/bin/sh
# install_torch.sh LOCK PIP...: torch's CPU build in the version of LOCK, by PIP, where there is no NVIDIA driver.
# The default index has the build with CUDA, whose libraries take gigabytes. TORCH_INDEX names the index that is asked once;
# if it is empty, none is. If it has no such torch, or does not answer, the default index is asked with all else.
set -eu
lock=$1
shift
# Folder with the files of a driver, for the tests.
root=${DRIVER_ROOT:-}
if [ -e "$root/dev/nvidiactl" ] || [ -e "$root/proc/driver/nvidia/version" ] || [ -e "$root/usr/lib/wsl/lib/libcuda.so.1" ]
then index=${TORCH_INDEX-}
else index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
fi
torch=$(grep '^torch==' "$lock")
if [ -z "$index" ]; then
    echo "$torch comes from the default index"
    exit
fi
shown=$(echo "$index" | sed 's,//[^/]*@,//,')
# A torch of that version stays, whatever its build.
if "$@" install -qqq --no-deps --retries 0 --timeout 10 --index-url "$index" "$torch"; then
    echo "$torch is there, or came from $shown"
else
    echo "$torch can't be had from $shown: it comes from the default index instead, with CUDA where that has no other;" \
        "TORCH_INDEX=URL names another index of CPU builds"
fi
