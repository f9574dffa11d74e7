-- Profit of stores near preferred customers: INTERSECT of a list and a grouped table.
with near as (
  select substr(ca_zip, 1, 5) as zip
  from customer_address
  where substr(ca_zip, 1, 5) in (
    '16668', '24244', '28877', '29843', '30399', '34136', '35124', '38721', '39145', '39431',
    '44107', '44244', '49275', '49454', '49584', '49843', '51521', '54338', '54854', '55124',
    '56867', '56971', '57746', '58252', '60191', '64854', '64975', '66787', '66871', '68721',
    '68828', '69840', '70399', '71711', '75124', '77838', '78370', '78721', '79454', '85709'
  )
  intersect
  select zip
  from (
    select substr(ca_zip, 1, 5) as zip, count(*) as cnt
    from customer_address
    join customer on c_current_addr_sk = ca_address_sk
    where c_preferred_cust_flag = 'Y'
    group by ca_zip
    having count(*) > 10
  ) as preferred
)
select s_store_name, sum(ss_net_profit) as profit
from store_sales
join date_dim on d_date_sk = ss_sold_date_sk
join store on s_store_sk = ss_store_sk
join near on substr(near.zip, 1, 2) = substr(s_zip, 1, 2)
where d_qoy = 2 and d_year = 1998
group by s_store_name
order by s_store_name, profit
limit 100
