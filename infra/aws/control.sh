data_disk() { echo "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${volume//-/}"; }

server_token() {
  /opt/flotilla/bin/python - "$secret" <<'PYTHON'
import sys

import boto3

arn = sys.argv[1]
parameter = boto3.client("ssm", region_name=arn.split(":")[3]).get_parameter(Name=arn, WithDecryption=True)
print(parameter["Parameter"]["Value"])
PYTHON
}

let_in() { # whoever AWS lets reach this machine by SSM; EC2 Instance Connect passes their key on, for a minute
  dpkg -s ec2-instance-connect >/dev/null 2>&1 || apt-get install -qq -y ec2-instance-connect
  jump_user
}
